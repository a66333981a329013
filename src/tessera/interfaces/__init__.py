"""What people touch: commands and pages."""
