"""What leaves the house: pictures with boxes, exported files, the report page."""
