"""Remote databases: connections, subscriptions and cuts."""
