"""What several passes share."""
