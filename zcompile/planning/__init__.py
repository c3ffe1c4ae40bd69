"""What plans of pipelines are made from: what units take, and what ranks do and hold with these."""
