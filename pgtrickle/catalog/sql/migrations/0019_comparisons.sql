-- Re-initializes, once, stream tables whose rows earlier versions may have computed wrongly: those that compare values
-- in USING or IN, whose text does not show the casts, and those over columns with a nondeterministic collation.
WITH RECURSIVE reached (pgt_id, relation) AS (
    SELECT s.pgt_id, s.view_relid::oid FROM pgtrickle.pgt_stream_tables AS s
    UNION
    SELECT r.pgt_id, d.refobjid
    FROM reached AS r
    JOIN pg_rewrite AS w ON w.ev_class = r.relation
    JOIN pg_depend AS d ON d.classid = 'pg_rewrite'::regclass AND d.objid = w.oid
      AND d.refclassid = 'pg_class'::regclass
    WHERE d.refobjid <> r.relation
)
UPDATE pgtrickle.pgt_stream_tables AS s
SET reinit_reason = 'earlier versions compared values of different types or collations wrongly'
WHERE s.frontier IS NOT NULL AND s.reinit_reason IS NULL
  AND EXISTS (
      SELECT FROM reached AS r
      JOIN pg_class AS c ON c.oid = r.relation
      WHERE r.pgt_id = s.pgt_id
        AND (c.relkind = 'v' AND pg_get_viewdef(c.oid) ~ ' USING \(| IN \( *(SELECT|VALUES|WITH)'
             OR EXISTS (SELECT FROM pg_attribute AS a JOIN pg_collation AS l ON l.oid = a.attcollation
                          AND NOT l.collisdeterministic
                        WHERE a.attrelid = c.oid)));
