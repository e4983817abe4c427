import { type Duration, durationMs } from '@bufbuild/protobuf/wkt';
import { type Instance, type LoadSample, Role } from '../../../gen/baton/v1/instance_pb.ts';
import type { RegisterInstanceRequest } from '../../../gen/baton/v1/pool_registry_pb.ts';
import { parseServerUrl } from '../../config/instance-url.ts';
import type { InstanceSpec } from '../../core/instance-spec.ts';
import { checkSize, invalidField } from '../call-arguments.ts';
import type { DescribedEngine, SentLoad } from '../engine-details.ts';

/** A registration that may be followed. */
export interface Registration {
  readonly spec: InstanceSpec;
  readonly engine: DescribedEngine;
  readonly load: LoadSample | undefined;
  /** Milliseconds; undefined for an instance that lives until it is removed. */
  readonly leaseMs: number | undefined;
}

const DEFAULT_LEASE_MS = 30_000;
const MIN_LEASE_MS = 1000;
const MAX_LEASE_MS = 3_600_000;
const DEFAULT_KV_LEASE_MS = 30_000;
const DEFAULT_DECODER_TTL_MS = 480_000;
const MAX_BLOCKS_MS = 24 * 3_600_000;
const MAX_ID_BYTES = 255;
const MAX_URL_BYTES = 2048;
const MAX_WORD_BYTES = 255;
const MAX_LABELS = 64;
const MAX_MODELS = 256;
const MAX_CARD_BYTES = 64 * 1024;

const ROLES: ReadonlyMap<Role, InstanceSpec['role']> = new Map([
  [Role.PREFILL, 'prefill'],
  [Role.DECODE, 'decode'],
  [Role.BOTH, 'both'],
]);

/**
 * Reads what is to be registered; `connectors` are the names that this baton knows.
 *
 * @throws BatonError INVALID_ARGUMENT that names the field
 */
export function readRegistration(request: RegisterInstanceRequest, connectors: readonly string[]): Registration {
  const { instance } = request;
  if (instance === undefined) throw invalidField('instance', 'is required');
  return {
    spec: readSpec(instance, connectors),
    engine: readEngine(instance),
    load: instance.load,
    leaseMs: request.untilRemoved ? undefined : readLease(request.lease),
  };
}

/** Reads a load that is told for `now`. */
export function readLoad(field: string, load: LoadSample, now: number): SentLoad {
  const { running, waiting, waitingDeferred, kvCacheUsage, age } = load;
  if (!(kvCacheUsage >= 0 && kvCacheUsage <= 1)) throw invalidField(`${field}.kv_cache_usage`, 'is not from 0 to 1');
  const ageMs = age === undefined ? 0 : durationMs(age);
  if (ageMs < 0) throw invalidField(`${field}.age`, 'is negative');
  return { running, waiting, waitingDeferred, kvCacheUsage, at: now - ageMs };
}

function readLease(lease: Duration | undefined): number {
  const ms = lease === undefined ? DEFAULT_LEASE_MS : durationMs(lease);
  if (ms < MIN_LEASE_MS || ms > MAX_LEASE_MS) throw invalidField('lease', 'must be from 1 s to 1 h');
  return ms;
}

const MAX_WEIGHT = 1000;
const MAX_RANKS = 4096;

function readSpec(instance: Instance, connectors: readonly string[]): InstanceSpec {
  const { url, id } = readUrl(instance);
  const role = ROLES.get(instance.role);
  if (role === undefined) {
    throw invalidField('instance.role', 'is required: ROLE_PREFILL, ROLE_DECODE or ROLE_BOTH');
  }
  if (!connectors.includes(instance.connector)) {
    const what = instance.connector === '' ? 'is required' : 'is not known';
    throw invalidField('instance.connector', `${what}: one of ${connectors.join(', ')}`);
  }
  const kv = instance.kv;
  const { weight } = instance;
  if (weight !== undefined && !(weight > 0 && weight <= MAX_WEIGHT)) {
    throw invalidField('instance.weight', `must be above 0 and at most ${MAX_WEIGHT}`);
  }
  const dataParallelSize = instance.engine?.dataParallelSize ?? 0;
  if (dataParallelSize > MAX_RANKS) {
    throw invalidField('instance.engine.data_parallel_size', `must be at most ${MAX_RANKS}`);
  }
  return {
    id,
    url,
    role,
    connector: instance.connector,
    headers: {},
    labels: readLabels(instance.labels),
    kvLeaseMs: readBlocksTime('instance.kv.lease', kv?.lease, DEFAULT_KV_LEASE_MS),
    decoderTtlMs: readBlocksTime('instance.kv.decoder_ttl', kv?.decoderTtl, DEFAULT_DECODER_TTL_MS),
    bidirectional: readChoice('instance.kv.bidirectional', kv?.bidirectional, ['auto', 'on', 'off']),
    loadFailurePolicy: readChoice('instance.kv.load_failure_policy', kv?.loadFailurePolicy, ['fail', 'recompute']),
    ...(weight === undefined ? {} : { weight }),
    ...(dataParallelSize === 0 ? {} : { dataParallelSize }),
  };
}

function readUrl(instance: Instance): { readonly url: string; readonly id: string } {
  if (instance.url === '') throw invalidField('instance.url', 'is required, like "http://10.0.0.1:8100"');
  checkSize('instance.url', instance.url, MAX_URL_BYTES);
  const parsed = parseServerUrl(instance.url);
  if (parsed.kind === 'bad') throw invalidField('instance.url', `is no base URL of an engine: ${parsed.message}`);
  const id = instance.id === '' ? parsed.value.id : instance.id;
  checkSize('instance.id', id, MAX_ID_BYTES);
  if (!/^[A-Za-z0-9[][A-Za-z0-9._:/[\]-]*$/.test(id)) {
    throw invalidField('instance.id', 'is no name of letters, digits and ._:/-');
  }
  return { url: parsed.value.url, id };
}

function readLabels(labels: Readonly<Record<string, string>>): Readonly<Record<string, string>> {
  const entries = Object.entries(labels);
  if (entries.length > MAX_LABELS) throw invalidField('instance.labels', `are more than ${MAX_LABELS}`);
  for (const [name, value] of entries) {
    if (name === '') throw invalidField('instance.labels', 'have one without a name');
    checkSize('instance.labels', name, MAX_WORD_BYTES);
    checkSize('instance.labels', value, MAX_WORD_BYTES);
  }
  return { ...labels };
}

function readBlocksTime(field: string, time: Duration | undefined, fallback: number): number {
  if (time === undefined) return fallback;
  const ms = durationMs(time);
  if (ms < 0 || ms > MAX_BLOCKS_MS) throw invalidField(field, 'must be from 0 to 24 h');
  return ms;
}

function readChoice(field: string, word: string | undefined, choices: readonly [string, ...string[]]): string {
  if (word === undefined || word === '') return choices[0];
  if (!choices.includes(word)) throw invalidField(field, `must be one of ${choices.join(', ')}`);
  return word;
}

function readEngine({ engine, incarnation, models, modelsKnown }: Instance): DescribedEngine {
  if (models.length > MAX_MODELS) throw invalidField('instance.models', `are more than ${MAX_MODELS}`);
  for (const { id, root, parent, rawJson } of models) {
    if (id === '') throw invalidField('instance.models', 'have one without an id');
    for (const text of [id, root, parent, rawJson]) checkSize('instance.models', text, MAX_CARD_BYTES);
  }
  const start = incarnation?.processStartSeconds;
  if (start !== undefined && !(Number.isFinite(start) && start >= 0)) {
    throw invalidField('instance.incarnation.process_start_seconds', 'is no time');
  }
  const words = { kind: engine?.kind ?? '', version: engine?.version ?? '' };
  const templateFingerprint = engine?.templateFingerprint ?? '';
  for (const text of [words.kind, words.version, templateFingerprint]) {
    checkSize('instance.engine', text, MAX_WORD_BYTES);
  }
  return {
    engineId: checkSize('instance.incarnation.engine_id', incarnation?.engineId ?? '', MAX_WORD_BYTES),
    ...(start === undefined ? {} : { processStartSeconds: start }),
    models,
    modelsKnown,
    ...words,
    blockSize: engine?.blockSize ?? 0,
    numGpuBlocks: engine?.numGpuBlocks ?? 0,
    templateFingerprint,
  };
}
