-- Refresh groups: stream tables whose members readers see at one moment, whatever they read. Diamonds are groups
-- automatically.

CREATE OR REPLACE FUNCTION pgtrickle.create_refresh_group(name text, members text[],
                                                          isolation text DEFAULT 'repeatable_read')
RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    ids bigint[] := ARRAY(SELECT DISTINCT pgtrickle._require_id(member) FROM pg_catalog.unnest(members) AS m (member)
                          ORDER BY 1);
BEGIN
    IF pg_catalog.lower(isolation) IS DISTINCT FROM 'repeatable_read' THEN
        RAISE EXCEPTION 'isolation cannot be %', pg_catalog.quote_nullable(isolation)
            USING ERRCODE = 'invalid_parameter_value',
                  HINT = 'Use repeatable_read: readers see all members at one moment.';
    ELSIF pg_catalog.cardinality(ids) < 2 THEN
        RAISE EXCEPTION 'refresh group % needs at least two stream tables', pg_catalog.quote_ident(name)
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM pgtrickle._gate('create_group', pg_catalog.jsonb_build_object('name', name, 'ids', ids));
    PERFORM pgtrickle._notify_services('group ' || name);
END
$$;

CREATE OR REPLACE FUNCTION pgtrickle._create_group(caller name, name text, ids bigint[]) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    member record;
BEGIN
    IF coalesce(name, '') = '' THEN
        RAISE EXCEPTION 'a refresh group needs a name' USING ERRCODE = 'invalid_parameter_value';
    ELSIF EXISTS (SELECT FROM pgtrickle.pgt_stream_tables AS s WHERE s.refresh_group = name) THEN
        RAISE EXCEPTION 'there is already a refresh group %', quote_ident(name)
            USING ERRCODE = 'duplicate_object',
                  HINT = format('SELECT pgtrickle.drop_refresh_group(%L); first, for other members.', name);
    END IF;
    FOR member IN SELECT * FROM pgtrickle.pgt_stream_tables AS s WHERE s.pgt_id = ANY (ids)
        ORDER BY s.pgt_id FOR NO KEY UPDATE LOOP
        PERFORM pgtrickle._require_owner(caller, member.pgt_id, 'group');
        IF member.refresh_group IS NOT NULL THEN
            RAISE EXCEPTION 'stream table % is in refresh group % already', member.pgt_relid,
                    quote_ident(member.refresh_group)
                USING ERRCODE = 'object_in_use',
                      HINT = format('One group per stream table: SELECT pgtrickle.drop_refresh_group(%L);',
                                    member.refresh_group);
        END IF;
    END LOOP;
    UPDATE pgtrickle.pgt_stream_tables AS s SET refresh_group = name, updated_at = now() WHERE s.pgt_id = ANY (ids);
END
$$;

CREATE OR REPLACE FUNCTION pgtrickle.drop_refresh_group(name text) RETURNS void
LANGUAGE sql
AS $$
    SELECT pgtrickle._gate('drop_group', pg_catalog.jsonb_build_object('name', name))
$$;

CREATE OR REPLACE FUNCTION pgtrickle._drop_group(caller name, name text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    member bigint;
    found_one boolean := false;
BEGIN
    FOR member IN SELECT s.pgt_id FROM pgtrickle.pgt_stream_tables AS s WHERE s.refresh_group = name LOOP
        PERFORM pgtrickle._require_owner(caller, member, 'ungroup');
        found_one := true;
    END LOOP;
    IF NOT found_one THEN
        RAISE EXCEPTION 'there is no refresh group %', quote_nullable(name)
            USING ERRCODE = 'undefined_object',
                  HINT = 'SELECT * FROM pgtrickle.refresh_groups() lists those there are.';
    END IF;
    UPDATE pgtrickle.pgt_stream_tables AS s SET refresh_group = NULL, updated_at = now() WHERE s.refresh_group = name;
    PERFORM pgtrickle._notify_services('group ' || name);
END
$$;

CREATE OR REPLACE FUNCTION pgtrickle.refresh_groups() RETURNS TABLE (group_name text, isolation text, members text[])
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT s.refresh_group, 'repeatable_read', array_agg(n.full_name ORDER BY n.full_name)
    FROM pgtrickle.pgt_stream_tables AS s JOIN pgtrickle._current_names() AS n USING (pgt_id)
    WHERE s.refresh_group IS NOT NULL GROUP BY 1 ORDER BY 1
$$;
