"""What operating systems do differently: one module per concern. Only this folder asks which system runs."""
