import * as z from 'zod';
import { optional, reader, section } from './fields.ts';
import { parseServerUrl } from './instance-url.ts';
import { instanceLmcacheKeys } from './lmcache.ts';
import {
  bad,
  choiceParser,
  countParser,
  numberParser,
  ok,
  parseDuration,
  parseHeaders,
  parseLabels,
  parseSecret,
  parseText,
  show,
  type ValueParser,
} from './values.ts';

const parseInstanceName: ValueParser<string> = (raw) =>
  typeof raw === 'string' && /^[A-Za-z0-9[][A-Za-z0-9._:/[\]-]{0,127}$/.test(raw)
    ? ok(raw)
    : bad(`expected a name of at most 128 letters, digits and ._:/-, got ${show(raw)}`);

/** What a pool gives to all its engines, and an engine may have of its own. */
export const engineKeys = {
  connector: optional(parseText, '`kv_connector`', 'Connector of these engines.'),
  headers: optional(parseHeaders, 'none', 'Headers added to every request to these engines.'),
  api_key: optional(parseSecret, '`OPENAI_API_KEY`', 'Key sent to these engines as `Authorization: Bearer KEY`.'),
  labels: optional(parseLabels, 'none', 'Labels shown in listings.'),
  kv_lease: optional(parseDuration, '30s', 'How long a prefill engine keeps the blocks of a handle after its reply.'),
  decoder_ttl: optional(parseDuration, '480s', 'How long a decode engine keeps the blocks of a handle.'),
  bidirectional: optional(
    choiceParser(['auto', 'on', 'off']),
    'auto',
    'Whether a prefill engine may read from a decode engine; `auto` finds out.',
  ),
  load_failure_policy: optional(
    choiceParser(['fail', 'recompute']),
    'fail',
    'What these engines do when KV cannot be loaded (their `kv_load_failure_policy`).',
  ),
  weight: optional(
    numberParser(0.001, 1000),
    '1',
    'Share of the work of one of these engines, relative to the others; `round_robin` and `random` do not look at it.',
  ),
  data_parallel_size: optional(
    countParser(1, 4096),
    'none: the engine chooses',
    'Data parallel ranks of one of these engines; with it baton chooses the rank (`X-data-parallel-rank`).',
  ),
};

/** One engine of a list of `instances`. */
export const instanceSchema = z.strictObject({
  url: reader(parseServerUrl).meta({ about: 'Base URL, `http(s)://host[:port][/prefix]`.', fallback: 'required' }),
  role: reader(choiceParser(['prefill', 'decode', 'both'])).meta({
    about: '`prefill`, `decode` or `both`.',
    fallback: 'required',
  }),
  lmcache: section(instanceLmcacheKeys).optional(),
  name: optional(parseInstanceName, '`host:port[/prefix]`', 'Instance id in logs, metrics and listings.'),
  ...engineKeys,
});

/** The settings of one engine as they stand in the file. */
export type FileInstance = z.output<typeof instanceSchema>;
/** The settings that a pool gives to all its engines. */
export type FilePool = z.output<z.ZodObject<typeof engineKeys>>;
