"""Images with boxes and the report page."""
