"""The catalog that pgtrickle keeps in a database: its SQL scripts and their installation."""
