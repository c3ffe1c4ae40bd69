"""All private names of torch that zcompile uses, with their purpose. The tests have run on torch 2.11 to 2.15.

Where releases differ, features are tested, not version numbers. Nothing outside this folder imports from a module of
torch whose path has a part that begins with an underscore.
"""
