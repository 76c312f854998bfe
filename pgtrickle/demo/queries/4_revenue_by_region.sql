SELECT c.region, count(*) AS lines, sum(i.quantity * i.price) AS revenue
FROM customers AS c
JOIN orders AS o ON o.customer_id = c.id
JOIN order_items AS i ON i.order_id = o.id
WHERE o.status IN ('paid', 'shipped')
GROUP BY c.region
