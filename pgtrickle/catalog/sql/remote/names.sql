-- Three-part names in the text of a query.

-- The query in tokens. If a token names a table of a registered database in three parts, `parts` has them.
CREATE OR REPLACE FUNCTION pgtrickle._query_tokens(query text) RETURNS TABLE (piece text, parts text[])
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    identifier CONSTANT text := '(?:"(?:[^"]|"")+"|[[:alpha:]_][[:alnum:]_$]*)';
    rest text := query;
    found text[];
    tag text;
    depth int;
BEGIN
    IF NOT EXISTS (SELECT FROM pgtrickle.pgt_databases) THEN
        RETURN QUERY SELECT _query_tokens.query, NULL::text[]; -- the usual case; the loop below is long
        RETURN;
    END IF;
    WHILE rest <> '' LOOP
        parts := NULL;
        found := regexp_match(rest, '^(' || identifier || ')\s*\.\s*(' || identifier || ')\s*\.\s*(' || identifier
                              || ')');
        IF found IS NOT NULL THEN
            piece
                := (regexp_match(rest, '^' || identifier || '\s*\.\s*' || identifier || '\s*\.\s*' || identifier))[1];
            found := ARRAY(SELECT (parse_ident(f))[1] FROM unnest(found) WITH ORDINALITY AS u (f, n) ORDER BY n);
            IF EXISTS (SELECT FROM pgtrickle.pgt_databases AS d WHERE d.name = found[1])
               OR EXISTS (SELECT FROM pgtrickle.pgt_database_sets AS s WHERE s.name = found[1]) THEN
                parts := found;
            END IF;
        ELSIF rest ~ '^/\*' THEN -- comments nest
            depth := 0;
            piece := '';
            LOOP
                found := regexp_match(substr(rest, length(piece) + 1), '^(/\*|\*/|/|\*|[^/*]+)');
                EXIT WHEN found IS NULL;
                piece := piece || found[1];
                depth := depth + CASE found[1] WHEN '/*' THEN 1 WHEN '*/' THEN -1 ELSE 0 END;
                EXIT WHEN depth = 0;
            END LOOP;
        ELSIF rest ~ '^\$([[:alpha:]_][[:alnum:]_]*)?\$' THEN
            tag := (regexp_match(rest, '^(\$(?:[[:alpha:]_][[:alnum:]_]*)?\$)'))[1];
            piece := substr(rest, 1,
                            coalesce(nullif(strpos(substr(rest, length(tag) + 1), tag), 0) + 2 * length(tag) - 1,
                                     length(rest)));
        ELSE
            piece := (regexp_match(rest, '^(--[^\n]*|[eE]''(?:[^''\\]|\\.|'''')*''|''(?:[^'']|'''')*''|"(?:[^"]|"")*"'
                                         '|[[:alnum:]_$]+(?:\s*\.\s*' || identifier || ')*|\s+|.)'))[1];
        END IF;
        rest := substr(rest, length(piece) + 1);
        RETURN NEXT;
    END LOOP;
END
$$;

CREATE OR REPLACE FUNCTION pgtrickle._three_part_names(query text)
RETURNS TABLE (database text, schema text, name text)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT DISTINCT parts[1], parts[2], parts[3] FROM pgtrickle._query_tokens(query) WHERE parts IS NOT NULL
$$;

-- The query as PostgreSQL can analyze it here: crm.public.customers is table customers of schema "crm.public".
CREATE OR REPLACE FUNCTION pgtrickle._localized_query(query text) RETURNS text
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    missing record;
BEGIN
    IF NOT EXISTS (SELECT FROM pgtrickle._three_part_names(query)) THEN
        RETURN _localized_query.query;
    END IF;
    SELECT * INTO missing FROM pgtrickle._three_part_names(query) AS f
    WHERE to_regclass(format('%I.%I', f.database || '.' || f.schema, f.name)) IS NULL LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'table % of database % has not been imported yet',
                format('%I.%I', missing.schema, missing.name),
                quote_ident(missing.database)
            USING ERRCODE = 'undefined_table',
                  HINT = format('Run: pgtrickle database import %I %I.%I (the command line '
                                'and Python do so automatically).',
                                missing.database, missing.schema, missing.name);
    END IF;
    RETURN (SELECT string_agg(CASE WHEN parts IS NULL THEN piece
                                   ELSE format('%I.%I', parts[1] || '.' || parts[2], parts[3]) END, '' ORDER BY n)
            FROM pgtrickle._query_tokens(query) WITH ORDINALITY AS p (piece, parts, n));
END
$$;
