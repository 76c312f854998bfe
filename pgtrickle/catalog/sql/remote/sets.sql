-- Stand-ins for the tables that all members of a set have.

-- Whether one of these columns is the same as this one, whatever its number.
CREATE OR REPLACE FUNCTION pgtrickle._has_column(columns jsonb, col jsonb) RETURNS boolean
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT EXISTS (SELECT FROM jsonb_array_elements(columns) AS o
                   WHERE o - '{attnum,not_null,generated}'::text[] = col - '{attnum,not_null,generated}'::text[])
$$;

-- Creates or updates the table here that stands for one of every member of a set. The stand-ins of the members exist
-- already; the columns are those of the first one.
CREATE OR REPLACE FUNCTION pgtrickle._import_set_table(
    caller name, database_set text, table_schema text, table_name text, members text[])
RETURNS regclass
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET client_min_messages = warning
AS $$
DECLARE
    local_schema text := database_set || '.' || table_schema;
    local_name text := format('%I.%I', local_schema, table_name);
    stand_in regclass := to_regclass(local_name);
    model record;
    differing record;
    col jsonb;
BEGIN
    PERFORM pgtrickle._require_database_use(caller, database_set);
    PERFORM pgtrickle._lock('stand_in ' || database_set);
    IF EXISTS (SELECT FROM unnest(members) AS m WHERE m NOT IN (SELECT pgtrickle._set_members(database_set))) THEN
        RAISE EXCEPTION 'not all of these databases are members of %', quote_ident(database_set)
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Register them as such: pgtrickle database add-set.';
    ELSIF EXISTS (SELECT FROM pgtrickle.pgt_shards AS s WHERE s.relid = stand_in AND s.database <> ALL (members)) THEN
        IF NOT has_function_privilege(caller, 'pgtrickle._administer()', 'EXECUTE') THEN
            RAISE EXCEPTION 'role % may not take databases out of a set', quote_ident(caller)
                USING ERRCODE = 'insufficient_privilege',
                      HINT = 'Ask the owner of the database or the role that installed pgtrickle.';
        END IF;
    END IF;
    SELECT f.* INTO model FROM pgtrickle._member_stand_ins(table_schema, table_name, members) AS f
    ORDER BY f.database LIMIT 1;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'no member of % has a table %', quote_ident(database_set),
                format('%I.%I', table_schema, table_name)
            USING ERRCODE = 'undefined_table', HINT = 'All members of a set must have the table.';
    END IF;
    IF stand_in IS NULL THEN
        SELECT f.database, c ->> 'name' AS name INTO differing
        FROM pgtrickle._member_stand_ins(table_schema, table_name, members) AS f
        CROSS JOIN jsonb_array_elements(model.columns) AS c
        WHERE NOT pgtrickle._has_column(f.columns, c)
        ORDER BY 1, 2 LIMIT 1;
    ELSE -- columns that queries may use; a column added later may be missing in some
        SELECT f.database, a.attname AS name INTO differing
        FROM pgtrickle._member_stand_ins(table_schema, table_name, members) AS f CROSS JOIN pg_attribute AS a
        WHERE a.attrelid = stand_in AND a.attnum > 1 AND NOT a.attisdropped
          AND NOT EXISTS (SELECT FROM pg_attribute AS o
                          WHERE o.attrelid = f.relid AND o.attname = a.attname AND NOT o.attisdropped
                          AND (o.atttypid, o.atttypmod, o.attcollation) = (a.atttypid, a.atttypmod, a.attcollation)
                          AND EXISTS (SELECT FROM jsonb_array_elements(f.columns) AS c WHERE c ->> 'name' = o.attname))
        ORDER BY 1, 2 LIMIT 1;
    END IF;
    IF differing.name IS NOT NULL THEN
        RAISE EXCEPTION 'column % of %.% is different in database % than in the others', quote_ident(differing.name),
                quote_ident(table_schema),
                quote_ident(table_name), quote_ident(differing.database)
            USING ERRCODE = 'datatype_mismatch',
                  HINT = 'Give it the same name, type and collation in all members.';
    END IF;
    IF stand_in IS NULL THEN
        stand_in := pgtrickle._create_stand_in(local_schema, table_name, 'every database of ' || database_set);
        EXECUTE format('ALTER TABLE %s ADD COLUMN pgt_database text NOT NULL', stand_in);
        INSERT INTO pgtrickle.pgt_sharded_tables VALUES (stand_in, database_set, table_schema, table_name);
    END IF;
    FOR col IN
        SELECT c FROM jsonb_array_elements(model.columns) AS c
        WHERE NOT EXISTS (SELECT FROM pg_attribute AS a WHERE a.attrelid = stand_in AND a.attname = c ->> 'name')
          AND NOT EXISTS (SELECT FROM pgtrickle._member_stand_ins(table_schema, table_name, members) AS f
                          WHERE NOT pgtrickle._has_column(f.columns, c))
    LOOP
        PERFORM pgtrickle._add_stand_in_column(stand_in, model.database, col);
    END LOOP;
    IF pgtrickle._primary_key(stand_in) <> 'null' AND EXISTS (
            SELECT FROM pgtrickle._member_stand_ins(table_schema, table_name, members) AS f
            WHERE pgtrickle._primary_key(stand_in) <> '["pgt_database"]' || pgtrickle._primary_key(f.relid)) THEN
        RAISE EXCEPTION 'the members of % have different primary keys for %.%', quote_ident(database_set),
                quote_ident(table_schema), quote_ident(table_name)
            USING ERRCODE = 'datatype_mismatch', HINT = 'Give it the same primary key in all members.';
    END IF;
    -- The common key and the database identify a row.
    IF NOT EXISTS (SELECT FROM pg_index AS i WHERE i.indrelid = stand_in)
       AND (SELECT count(DISTINCT pgtrickle._primary_key(f.relid)) = 1
              AND bool_and(pgtrickle._primary_key(f.relid) <> 'null')
            FROM pgtrickle._member_stand_ins(table_schema, table_name, members) AS f) THEN
        PERFORM pgtrickle._set_stand_in_key(stand_in, '["pgt_database"]' || pgtrickle._primary_key(model.relid));
    END IF;
    PERFORM pgtrickle._update_shards(stand_in, members);
    PERFORM pgtrickle._grant_stand_ins(database_set);
    RETURN stand_in;
END
$$;

CREATE OR REPLACE FUNCTION pgtrickle._primary_key(relation regclass) RETURNS jsonb
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT coalesce((SELECT jsonb_agg(a.attname ORDER BY k.ord) FROM pg_index AS i
                     CROSS JOIN LATERAL unnest(i.indkey[0 : i.indnkeyatts - 1]) WITH ORDINALITY AS k (attnum, ord)
                     JOIN pg_attribute AS a ON a.attrelid = relation AND a.attnum = k.attnum
                     WHERE i.indrelid = relation AND i.indisprimary), 'null')
$$;

-- From now on the stand-in stands for the tables of these members. A new member is read by itself; if one left,
-- everything is read again.
CREATE OR REPLACE FUNCTION pgtrickle._update_shards(stand_in regclass, databases text[]) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    gone text;
    number integer;
BEGIN
    WITH removed AS (
        DELETE FROM pgtrickle.pgt_shards AS s WHERE s.relid = stand_in AND s.database <> ALL (databases)
        RETURNING s.database
    ) SELECT string_agg(quote_ident(database), ', ' ORDER BY database) INTO gone FROM removed;
    INSERT INTO pgtrickle.pgt_shards AS s (relid, database, member_relid)
    SELECT stand_in, f.database, f.relid
    FROM pgtrickle.pgt_sharded_tables AS t
    JOIN pgtrickle.pgt_foreign_tables AS f USING (source_schema, source_name)
    WHERE t.relid = stand_in AND f.resolved_by IS NULL AND f.database = ANY (databases)
    ON CONFLICT DO NOTHING;
    GET DIAGNOSTICS number = ROW_COUNT;
    IF gone IS NULL AND number = 0 THEN
        RETURN;
    END IF;
    IF NOT EXISTS (SELECT FROM pgtrickle.pgt_shards AS s WHERE s.relid = stand_in)
       AND NOT EXISTS (SELECT FROM pgtrickle.pgt_sharded_tables AS t
                       WHERE t.relid = stand_in AND t.database_set = '@cluster')
       AND EXISTS (SELECT FROM pgtrickle.pgt_dependencies AS d WHERE d.through = stand_in) THEN
        RAISE EXCEPTION '% is the last database behind %, which stream tables read', gone, stand_in
            USING ERRCODE = 'dependent_objects_still_exist', HINT = 'Drop those stream tables first.';
    END IF;
    PERFORM pgtrickle._register_sources(s.pgt_id) FROM pgtrickle.pgt_stream_tables AS s
    WHERE EXISTS (SELECT FROM pgtrickle._sources(s.view_relid) AS u WHERE u.relation = stand_in);
    IF gone IS NOT NULL THEN
        UPDATE pgtrickle.pgt_stream_tables AS s
        SET reinit_reason = format(CASE WHEN gone LIKE '%%@%%' THEN '%s left the cluster'
                                        ELSE '%s left the set of databases' END, gone), next_due = '-infinity'
        WHERE s.frontier IS NOT NULL
          AND EXISTS (SELECT FROM pgtrickle._sources(s.view_relid) AS u WHERE u.relation = stand_in);
    ELSE -- due at once
        UPDATE pgtrickle.pgt_stream_tables AS s SET next_due = '-infinity', polled = true
        WHERE EXISTS (SELECT FROM pgtrickle._sources(s.view_relid) AS u WHERE u.relation = stand_in);
    END IF;
    PERFORM pgtrickle._notify_services('members of a set changed');
END
$$;
