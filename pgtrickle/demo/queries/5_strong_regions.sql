SELECT region, revenue, round(revenue / lines, 2) AS per_line
FROM revenue_by_region
WHERE revenue > 1000
