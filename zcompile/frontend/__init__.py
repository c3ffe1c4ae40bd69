"""From torch.compile to a program."""
