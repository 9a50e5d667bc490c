"""Pictures with boxes and the report page."""
