-- What determines the meaning of a query besides its text: the views and functions it uses, each with the transaction
-- that last changed it, and the labels of its enums.
WITH RECURSIVE reached AS (
    SELECT v.pgt_id, v.view_relid::oid AS oid
    FROM unnest(%(ids)s::bigint[], %(views)s::oid[]) AS v(pgt_id, view_relid)
    UNION
    SELECT reached.pgt_id, d.refobjid
    FROM reached
    JOIN pg_rewrite r ON r.ev_class = reached.oid
    JOIN pg_depend d ON d.classid = 'pg_rewrite'::regclass AND d.objid = r.oid AND d.refclassid = 'pg_class'::regclass
    WHERE d.refobjid <> reached.oid
), rules AS (
    SELECT reached.pgt_id, r.oid, r.xmin
    FROM reached
    JOIN pg_rewrite r ON r.ev_class = reached.oid
), used AS (
    SELECT DISTINCT rules.pgt_id, d.refclassid, d.refobjid
    FROM rules
    JOIN pg_depend d ON d.classid = 'pg_rewrite'::regclass AND d.objid = rules.oid
), called AS ( -- aggregates call functions of their own, and operators stand for functions
    SELECT used.pgt_id, used.refobjid AS oid FROM used WHERE used.refclassid = 'pg_proc'::regclass
    UNION
    SELECT used.pgt_id, part.oid
    FROM used
    JOIN pg_aggregate a ON a.aggfnoid = used.refobjid AND a.aggfnoid >= 16384
    CROSS JOIN unnest(ARRAY[a.aggtransfn, a.aggfinalfn]) AS part (oid)
    WHERE used.refclassid = 'pg_proc'::regclass
    UNION
    SELECT used.pgt_id, o.oprcode FROM used JOIN pg_operator o ON o.oid = used.refobjid
    WHERE used.refclassid = 'pg_operator'::regclass
), functions AS (
    SELECT called.pgt_id, p.oid, p.xmin::text AS xmin FROM called JOIN pg_proc p ON p.oid = called.oid
), types AS (
    SELECT used.pgt_id, used.refobjid AS oid FROM used WHERE used.refclassid = 'pg_type'::regclass
    UNION
    SELECT used.pgt_id, a.atttypid -- all columns, because whole-row references do not record theirs
    FROM used
    JOIN pg_attribute a ON a.attrelid = used.refobjid AND a.attnum > 0
    WHERE used.refclassid = 'pg_class'::regclass AND a.atttypid >= 16384
)
SELECT v.pgt_id,
       pgtrickle.stable_hash((SELECT string_agg(rules.oid || ':' || rules.xmin, ',' ORDER BY rules.oid)
            FROM rules WHERE rules.pgt_id = v.pgt_id)
           || '/' || coalesce((SELECT string_agg(f.oid || ':' || f.xmin, ',' ORDER BY f.oid)
                               FROM functions f WHERE f.pgt_id = v.pgt_id), '')
           -- While a guard trigger was disabled, somebody may have written to the table.
           || '/' || coalesce((SELECT string_agg(t.tgenabled::text || ':' || t.xmin, ',')
                               FROM pgtrickle.pgt_stream_tables s
                               JOIN pg_trigger t ON t.tgrelid = s.pgt_relid AND t.tgname = 'pgtrickle_guard'
                               WHERE s.pgt_id = v.pgt_id AND s.st_placement = 'local'), '')) AS meaning,
       (SELECT
        pgtrickle.stable_hash(string_agg(concat_ws(':', a.attrelid, c.relname, n.nspname, a.attnum, a.attname,
                                                   a.atttypid, a.atttypmod),
                              ',' ORDER BY a.attrelid, a.attnum)
                   -- Names in texts are resolved when they are parsed: a new function with the same name may be a
                   -- better match.
                   || coalesce((SELECT string_agg(DISTINCT p.oid::text, ',') FROM functions f
                                JOIN pg_proc o ON o.oid = f.oid AND o.oid >= 16384
                                JOIN pg_proc p ON p.proname = o.proname AND p.pronamespace = o.pronamespace
                                WHERE f.pgt_id = v.pgt_id), '')
                   || coalesce((SELECT string_agg(i.indexrelid || ':' || i.xmin, ',' ORDER BY i.indexrelid)
                                FROM reached r JOIN pg_index i ON i.indrelid = r.oid AND i.indisunique
                                WHERE r.pgt_id = v.pgt_id), '')
                   ||
                       coalesce((SELECT string_agg(m.member_relid::oid || ':' || f.shape, ','
                                                   ORDER BY m.relid, m.database)
                                FROM reached r JOIN pgtrickle.pgt_shards m ON m.relid = r.oid
                                JOIN pgtrickle.pgt_foreign_tables f ON f.relid = m.member_relid
                                WHERE r.pgt_id = v.pgt_id), '')
                   || coalesce((SELECT string_agg(t.relid::oid::text, ',' ORDER BY t.relid::oid)
                                FROM reached r JOIN pgtrickle.pgt_sharded_tables t ON t.relid = r.oid
                                    AND t.database_set = '@cluster'
                                WHERE r.pgt_id = v.pgt_id), '')
                   || coalesce((SELECT string_agg(f.relid::oid || ':' || f.shape, ',' ORDER BY f.relid::oid)
                                FROM reached r JOIN pgtrickle.pgt_foreign_tables f ON f.relid = r.oid
                                    AND f.resolved_by IS NOT NULL
                                WHERE r.pgt_id = v.pgt_id), ''))
        FROM reached
        JOIN pg_class c ON c.oid = reached.oid
        JOIN pg_namespace n ON n.oid = c.relnamespace
        JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0
        WHERE reached.pgt_id = v.pgt_id) AS shape,
       pgtrickle._enum_labels(ARRAY(SELECT t.oid FROM types t WHERE t.pgt_id = v.pgt_id)) AS labels
FROM unnest(%(ids)s::bigint[]) AS v(pgt_id);
