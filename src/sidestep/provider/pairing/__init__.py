"""Who is paired with whom, and what carries their bytes."""
