"""The program: its operations, layout, text and how it is read and edited."""
