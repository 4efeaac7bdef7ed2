"""Apache Iceberg tables: read snapshot by snapshot, and written exactly once by one commit for all subtasks."""
