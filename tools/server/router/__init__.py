"""Several models in one server: their list, their memory, their processes and their endpoints."""
