"""schedule → execute → sample → publish, one step at a time."""
