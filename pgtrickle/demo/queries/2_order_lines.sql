SELECT i.order_id, i.line, o.customer_id, o.status, i.product, i.quantity * i.price AS amount
FROM orders AS o
JOIN order_items AS i ON i.order_id = o.id
WHERE o.status <> 'cancelled'
