"""The front end: from torch.compile to a program."""
