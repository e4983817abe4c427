import * as z from 'zod';
import { isTenantName } from '../core/tenant.ts';
import { field, optional, reader, section } from './fields.ts';
import { parseKeySetUrl } from './instance-url.ts';
import {
  bad,
  choiceParser,
  countParser,
  listParser,
  MAX_COUNT,
  ok,
  parseDuration,
  parseHeaderName,
  parseNetwork,
  parseText,
  show,
  type ValueParser,
} from './values.ts';

const parseLimit = countParser(0, MAX_COUNT);

/** Signatures that only the issuer can make, in lower case. */
const ALGORITHMS = [
  'rs256',
  'rs384',
  'rs512',
  'ps256',
  'ps384',
  'ps512',
  'es256',
  'es384',
  'es512',
  'eddsa',
  'ed25519',
] as const;

const parseTenant: ValueParser<string> = (raw) =>
  typeof raw === 'string' && isTenantName(raw) ? ok(raw) : bad(`expected the name of a tenant, got ${show(raw)}`);

/** What one tenant has of its own. */
const tenantSchema = z.strictObject({
  name: reader(parseTenant).meta({ about: 'The tenant.', fallback: 'required' }),
  requests_per_minute: optional(parseLimit, 'that of `tenant.limits`', 'Its requests a minute.'),
  tokens_per_minute: optional(parseLimit, 'that of `tenant.limits`', 'Its tokens a minute.'),
  concurrency: optional(parseLimit, 'that of `tenant.limits`', 'Its requests at a time.'),
});

/** How clients show who they are. */
export const authKeys = {
  api_keys_file: optional(
    parseText,
    'none',
    "File with the hashes of clients' keys; with it a client needs one of these keys.",
  ),
  jwt: section({
    jwks_url: optional(
      parseKeySetUrl,
      'none',
      'Address of the keys of an issuer (JWKS); with it a client may show a token (JWT) of this issuer.',
    ),
    jwks_file: optional(parseText, 'none', 'File with these keys, instead of an address.'),
    issuer: optional(parseText, 'none', 'The issuer, `iss` of its tokens.'),
    audience: optional(listParser(parseText), 'none', 'Audiences, `aud`; a token has to be for one of them.'),
    tenant_claim: field(parseText, 'sub', 'Claim of a token that names the tenant.'),
    algorithms: field(
      listParser(choiceParser(ALGORITHMS)),
      ['rs256', 'ps256', 'es256', 'es384', 'eddsa'],
      'Ways of signing that count; none of them has a shared secret.',
    ),
    clock_tolerance: field(parseDuration, '30s', 'How wrong clocks may be.'),
    refresh: field(
      parseDuration,
      '10m',
      'Until the keys are read again from their address; 0: only at the start and for a key that is not known.',
    ),
  }),
};

/** Whose a request is, and what that one may use. */
export const tenantKeys = {
  header: optional(
    parseHeaderName,
    'none',
    'Header in which proxies name the tenant of a request; of others it is taken away.',
  ),
  trusted_proxies: optional(
    listParser(parseNetwork),
    'none',
    'Addresses and networks of these proxies; their `X-Forwarded-*` headers reach engines.',
  ),
  limits: section({
    requests_per_minute: field(
      parseLimit,
      0,
      'Requests of a tenant a minute; more are answered with 429; 0: no limit.',
    ),
    tokens_per_minute: field(
      parseLimit,
      0,
      'Tokens of a tenant a minute, of prompts and replies; who has used them gets 429; 0: no limit.',
    ),
    concurrency: field(parseLimit, 0, 'Requests of a tenant at a time; more are answered with 429; 0: no limit.'),
  }),
  own_limits: z.preprocess((raw) => raw ?? undefined, z.array(tenantSchema).optional()),
};
