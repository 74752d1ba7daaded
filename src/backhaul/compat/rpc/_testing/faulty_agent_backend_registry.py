"""The reference registers its faulty backend here."""
