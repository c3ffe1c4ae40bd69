"""The cost of a program: bytes, FLOPs and seconds, predicted and measured."""
