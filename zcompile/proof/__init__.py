"""Proofs that a program computes the traced step, by terms, and that the communications of ranks fit together."""
