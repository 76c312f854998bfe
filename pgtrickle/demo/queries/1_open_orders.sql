SELECT id, customer_id, placed_at
FROM orders
WHERE status = 'open'
