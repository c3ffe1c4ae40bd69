"""The program: its operations, its layout, its text, and how it is read and edited."""
