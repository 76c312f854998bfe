-- Types and collations of a view's columns; a collation is named if it is not the default of the type.
SELECT a.atttypid::bigint,
       a.atttypmod,
       CASE WHEN l.collname <> 'default'
            AND a.atttypid <> 'name'::regtype THEN format('%%I.%%I', n.nspname, l.collname) ELSE '' END,
       coalesce(l.collisdeterministic, true)
FROM pg_attribute AS a
LEFT JOIN pg_collation AS l ON l.oid = a.attcollation
LEFT JOIN pg_namespace AS n ON n.oid = l.collnamespace
WHERE a.attrelid = %s::regclass AND a.attnum > 0
ORDER BY a.attnum;
