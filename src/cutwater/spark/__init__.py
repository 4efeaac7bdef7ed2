"""What Spark users touch: sessions, DataFrames in and out."""
