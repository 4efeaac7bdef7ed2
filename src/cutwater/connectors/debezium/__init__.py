"""Debezium: change events of tables, as JSON or Avro, to updating streams."""
