"""The DTensors that users see: parameters, gradients and state, and how they are divided."""
