import { create } from '@bufbuild/protobuf';
import { durationFromMs, durationMs } from '@bufbuild/protobuf/wkt';
import {
  type Instance,
  InstanceSchema,
  InstanceState,
  KvSettingsSchema,
  Role,
} from '../../gen/baton/v1/instance_pb.ts';
import { type RegisterInstanceRequest, RegisterInstanceRequestSchema } from '../../gen/baton/v1/pool_registry_pb.ts';
import { BatonError } from '../core/errors.ts';
import { roleWord, stateWord } from '../core/instance-words.ts';

/** The peers' word for a role: an engine that serves whole requests is `regular`. */
function workerType(role: Role): string {
  return role === Role.BOTH ? 'regular' : roleWord(role);
}

const ROLES: ReadonlyMap<unknown, Role> = new Map([
  ['prefill', Role.PREFILL],
  ['decode', Role.DECODE],
  ['regular', Role.BOTH],
  ['both', Role.BOTH],
]);

/** An instance as `/workers` shows it. */
export function workerJson(instance: Instance): Readonly<Record<string, unknown>> {
  const { id, url, role, connector, state, stateReason, models, labels, incarnation, engine, load } = instance;
  return {
    id,
    url,
    worker_type: workerType(role),
    connector,
    state: stateWord(state),
    state_reason: stateReason,
    is_healthy: state === InstanceState.READY,
    model_id: models[0]?.id ?? null,
    models: models.map((model) => model.id),
    labels,
    generation: incarnation?.generation ?? 0,
    engine: { kind: engine?.kind ?? '', version: engine?.version ?? '' },
    load: load === undefined ? null : load.running + load.waiting + load.waitingDeferred,
    kv_cache_usage: load?.kvCacheUsage ?? null,
    load_age_seconds: load?.age === undefined ? null : durationMs(load.age) / 1000,
  };
}

/** What `GET /workers` answers. */
export function workersJson(instances: readonly Instance[]): Readonly<Record<string, unknown>> {
  const count = (role: Role) => instances.filter((instance) => instance.role === role).length;
  return {
    workers: instances.map(workerJson),
    total: instances.length,
    stats: {
      prefill_count: count(Role.PREFILL),
      decode_count: count(Role.DECODE),
      regular_count: count(Role.BOTH),
    },
  };
}

type Body = Readonly<Record<string, unknown>>;

/** Members of the body of `POST /workers`. */
const MEMBERS = [
  'url',
  'worker_type',
  'role',
  'id',
  'connector',
  'labels',
  'lease_seconds',
  'kv_lease_seconds',
  'decoder_ttl_seconds',
  'bidirectional',
  'load_failure_policy',
];

/** Reads the body of `POST /workers`; without a lease the worker lives until it is removed. */
export function readWorker(body: Body, idempotencyKey: string, connector: string): RegisterInstanceRequest {
  for (const name of Object.keys(body)) {
    if (!MEMBERS.includes(name)) throw invalid(name, `is not known; known: ${MEMBERS.join(', ')}`);
  }
  const named = body['worker_type'] ?? body['role'];
  const role = ROLES.get(named);
  if (role === undefined) throw invalid('worker_type', 'is required: prefill, decode or regular');
  const lease = seconds(body, 'lease_seconds');
  const kvLease = seconds(body, 'kv_lease_seconds');
  const decoderTtl = seconds(body, 'decoder_ttl_seconds');
  return create(RegisterInstanceRequestSchema, {
    idempotencyKey,
    untilRemoved: lease === undefined,
    ...(lease === undefined ? {} : { lease }),
    instance: create(InstanceSchema, {
      id: text(body, 'id'),
      url: text(body, 'url'),
      role,
      connector: text(body, 'connector') || connector,
      labels: labels(body['labels']),
      kv: create(KvSettingsSchema, {
        bidirectional: text(body, 'bidirectional'),
        loadFailurePolicy: text(body, 'load_failure_policy'),
        ...(kvLease === undefined ? {} : { lease: kvLease }),
        ...(decoderTtl === undefined ? {} : { decoderTtl }),
      }),
    }),
  });
}

/** The reason in a body, empty without one. */
export function readReason(body: Body): string {
  for (const name of Object.keys(body)) if (name !== 'reason') throw invalid(name, 'is not known; known: reason');
  return text(body, 'reason');
}

function text(body: Body, name: string): string {
  const value = body[name] ?? '';
  if (typeof value !== 'string') throw invalid(name, 'is not a text');
  return value;
}

function seconds(body: Body, name: string) {
  const value = body[name];
  if (value === undefined || value === null) return undefined;
  if (typeof value !== 'number' || !(Math.abs(value) < 1e9)) throw invalid(name, 'is not a number of seconds');
  return durationFromMs(Math.round(value * 1000));
}

function labels(value: unknown): Record<string, string> {
  if (value === undefined || value === null) return {};
  if (typeof value !== 'object' || Array.isArray(value)) throw invalid('labels', 'is not an object of texts');
  return Object.fromEntries(
    Object.entries(value).map(([name, label]) => {
      if (typeof label !== 'string') throw invalid('labels', 'is not an object of texts');
      return [name, label];
    }),
  );
}

function invalid(name: string, what: string): BatonError {
  return new BatonError({ reason: 'INVALID_ARGUMENT', message: `${name} ${what}`, param: name });
}
