"""What a program costs: bytes, FLOPs and seconds, predicted and measured."""
