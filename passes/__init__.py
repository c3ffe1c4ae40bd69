"""The compiler passes: one per file, each a function from Program to Program."""
