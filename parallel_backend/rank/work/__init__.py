"""The models that a rank holds, and the requests that it runs."""
