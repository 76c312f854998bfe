"""What pgtrickle keeps in a database: the SQL scripts, and their installation."""
