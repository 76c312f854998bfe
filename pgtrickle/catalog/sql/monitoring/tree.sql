-- Dependencies as a tree.

-- Stream tables without readers, and below each what it reads. A stream table that was already shown is not expanded
-- again: a DAG of diamonds would double with every level.
CREATE OR REPLACE FUNCTION pgtrickle.dependency_tree()
RETURNS TABLE (tree_line text, pgt_schema text, pgt_name text, depth integer, source_type text, status text)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    root record;
    stack jsonb;
    node jsonb;
    below text;
    shown bigint[] := '{}';
    again boolean;
BEGIN
    FOR root IN
        SELECT s.pgt_id FROM pgtrickle.pgt_stream_tables AS s JOIN pgtrickle._current_names() AS n USING (pgt_id)
        WHERE NOT EXISTS (SELECT FROM pgtrickle.pgt_dependencies AS d WHERE s.pgt_relid IN (d.source_relid, d.through))
        ORDER BY n.pgt_schema, n.pgt_name
    LOOP
        SELECT jsonb_build_array(jsonb_build_object('id', n.pgt_id, 'schema', n.pgt_schema, 'name', n.pgt_name,
                                                    'depth', 0,
                                                    'type', 'STREAM_TABLE', 'lead', '', 'branch', ''))
        INTO stack FROM pgtrickle._current_names() AS n WHERE n.pgt_id = root.pgt_id;
        WHILE jsonb_array_length(stack) > 0 LOOP
            node := stack -> -1;
            stack := stack - (-1);
            pgt_schema := node ->> 'schema';
            pgt_name := node ->> 'name';
            depth := node ->> 'depth';
            source_type := node ->> 'type';
            status := (SELECT s.status FROM pgtrickle.pgt_stream_tables AS s WHERE s.pgt_id = (node ->> 'id')::bigint);
            again := coalesce((node ->> 'id')::bigint = ANY (shown), false);
            tree_line := concat(node ->> 'lead', node ->> 'branch', format('%I.%I', pgt_schema, pgt_name),
                                ' (' || coalesce(status, lower(replace(source_type, '_', ' '))) || ')',
                                CASE WHEN again THEN ', see above' END);
            RETURN NEXT;
            CONTINUE WHEN again OR node ->> 'id' IS NULL;
            shown := shown || (node ->> 'id')::bigint;
            below := concat(node ->> 'lead',
                            CASE node ->> 'branch' WHEN '+-- ' THEN '|   ' WHEN '`-- ' THEN '    ' END);
            -- The last child is pushed first and popped last.
            stack := stack || (
                SELECT coalesce(jsonb_agg(jsonb_build_object(
                           'id', child.pgt_id, 'schema', child.schema, 'name', child.name,
                           'depth', (node ->> 'depth')::integer + 1,
                           'type', child.source_type, 'lead', below, 'branch',
                           CASE child.place WHEN 1 THEN '`-- ' ELSE '+-- ' END)
                           ORDER BY child.place), '[]')
                FROM (
                    SELECT each.*, row_number() OVER (ORDER BY each.schema DESC, each.name DESC) AS place
                    FROM (
                        SELECT DISTINCT u.pgt_id,
                               CASE WHEN u.pgt_id IS NOT NULL THEN 'STREAM_TABLE'
                                    WHEN pgtrickle._is_read_from_nodes(d.through) THEN 'DISTRIBUTED'
                                    ELSE d.source_type END AS source_type,
                               coalesce(n.nspname, d.source_schema) AS schema,
                               coalesce(c.relname, d.source_name) AS name
                        FROM pgtrickle.pgt_dependencies AS d
                        LEFT JOIN pgtrickle.pgt_stream_tables AS u ON u.pgt_relid = coalesce(d.through, d.source_relid)
                        LEFT JOIN pg_class AS c
                            ON c.oid = CASE WHEN pgtrickle._is_read_from_nodes(d.through) THEN d.through
                                            ELSE d.source_relid END
                        LEFT JOIN pg_namespace AS n ON n.oid = c.relnamespace
                        WHERE d.pgt_id = (node ->> 'id')::bigint
                    ) AS each
                ) AS child);
        END LOOP;
    END LOOP;
END
$$;
