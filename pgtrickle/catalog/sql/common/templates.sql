-- Templates of generated functions. install.py creates the function _template(name) from the files in templates/.

-- A template with its {parameters} replaced, NULL by nothing. Values are not searched for parameters: they contain
-- names that users chose.
CREATE OR REPLACE FUNCTION pgtrickle._fill_template(name text, parameters jsonb) RETURNS text
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp SET standard_conforming_strings = on
AS $$
DECLARE
    piece text[];
    result text := '';
BEGIN
    FOR piece IN
        SELECT matched FROM regexp_matches(pgtrickle._template(name), '([^{]+|\{(?![a-z_]+\}))|\{([a-z_]+)\}', 'g')
               AS matched
    LOOP
        IF piece[2] IS NULL THEN
            result := result || piece[1];
        ELSIF NOT parameters ? piece[2] THEN
            RAISE EXCEPTION 'parameter % of template % has no value', piece[2], quote_nullable(name)
                USING ERRCODE = 'undefined_parameter';
        ELSE
            result := result || coalesce(parameters ->> piece[2], '');
        END IF;
    END LOOP;
    RETURN result;
END
$$;
