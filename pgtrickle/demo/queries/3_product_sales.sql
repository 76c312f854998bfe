SELECT product, count(*) AS lines, sum(quantity) AS pieces, avg(price) AS average_price
FROM order_items
GROUP BY product
