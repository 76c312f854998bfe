"""Other databases: connections, subscriptions and cuts."""
