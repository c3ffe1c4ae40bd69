"""The passes: one a file, each a function from Program to Program."""
