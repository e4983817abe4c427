import type { InstanceRole } from '../core/instance-spec.ts';
import type { InstanceConfig } from './config.ts';
import type { InstanceDefaults } from './discovery.ts';
import type { FileInstance, FilePool } from './engine-keys.ts';
import { connectorKey, type NamePlace, resolveName } from './names.ts';
import type { Problem } from './problem.ts';

interface Sink {
  readonly problems: Problem[];
  readonly warnings: Problem[];
}

/** One entry of a list of instances, and where it is written. */
export interface InstanceItem {
  readonly item: FileInstance;
  readonly where: string;
  readonly connectorAt: NamePlace;
}

/** Where the entry of a number is written. */
export function placeOfInstance(
  i: number,
  locate: (path: readonly PropertyKey[]) => string,
): Omit<InstanceItem, 'item'> {
  const connector = ['instances', i, 'connector'];
  return { where: locate(['instances', i]), connectorAt: { where: locate(connector), path: connector } };
}

/** What the instances of a pool have, unless they say otherwise; `connector` is a known name. */
export function poolDefaults(pool: FilePool, connector: string): InstanceDefaults[InstanceRole] {
  return {
    connector,
    headers: pool.headers ?? {},
    ...(pool.api_key === undefined ? {} : { apiKey: pool.api_key }),
    labels: pool.labels ?? {},
    kvLeaseMs: pool.kv_lease ?? 30_000,
    decoderTtlMs: pool.decoder_ttl ?? 480_000,
    bidirectional: pool.bidirectional ?? 'auto',
    loadFailurePolicy: pool.load_failure_policy ?? 'fail',
    ...(pool.weight === undefined ? {} : { weight: pool.weight }),
    ...(pool.data_parallel_size === undefined ? {} : { dataParallelSize: pool.data_parallel_size }),
  };
}

/** Makes instances of checked entries. One whose URL or id stood before is a problem, and left out. */
export function buildInstances(
  items: readonly InstanceItem[],
  defaults: InstanceDefaults,
  connectors: readonly string[],
  sink: Sink,
): readonly InstanceConfig[] {
  const seen = new Map<string, string>();
  const instances: InstanceConfig[] = [];
  for (const { item, where, connectorAt } of items) {
    const instance = buildInstance(item, defaults[item.role]);
    const twice = findTwice(instance, where, seen);
    if (twice !== undefined) {
      sink.problems.push({ where, message: twice });
      continue;
    }
    if (instance.url.endsWith('/v1')) {
      sink.warnings.push({
        where,
        message: `${instance.url} ends in /v1, which baton adds itself; requests go to ${instance.url}/v1/...`,
      });
    }
    const before = sink.problems.length;
    const connector =
      item.connector === undefined
        ? instance.connector
        : resolveName(item.connector, connectors, connectorKey, connectorAt, sink);
    if (sink.problems.length === before) instances.push({ ...instance, connector });
  }
  return instances;
}

/** Why an engine would be in the pool twice; remembers it otherwise. */
function findTwice({ url, id }: InstanceConfig, where: string, seen: Map<string, string>): string | undefined {
  for (const [mark, message, hint] of [
    [url, `${url} is named twice, here and at`, 'one server that does both has role both'],
    [`id ${id}`, `the instance id "${id}" is used twice, here and at`, 'give one of them another name'],
  ] as const) {
    const first = seen.get(mark);
    if (first !== undefined) return `${message} ${first}; ${hint}`;
  }
  seen.set(url, where).set(`id ${id}`, where);
  return undefined;
}

function buildInstance(item: FileInstance, pool: InstanceDefaults[InstanceRole]): InstanceConfig {
  return {
    ...pool,
    id: item.name ?? item.url.id,
    url: item.url.url,
    role: item.role,
    headers: { ...pool.headers, ...item.headers },
    ...(item.api_key === undefined ? {} : { apiKey: item.api_key }),
    labels: { ...pool.labels, ...item.labels },
    kvLeaseMs: item.kv_lease ?? pool.kvLeaseMs,
    decoderTtlMs: item.decoder_ttl ?? pool.decoderTtlMs,
    bidirectional: item.bidirectional ?? pool.bidirectional,
    loadFailurePolicy: item.load_failure_policy ?? pool.loadFailurePolicy,
    ...(item.weight === undefined ? {} : { weight: item.weight }),
    ...(item.data_parallel_size === undefined ? {} : { dataParallelSize: item.data_parallel_size }),
    ...instanceLmcache(item.lmcache),
  };
}

function instanceLmcache(own: FileInstance['lmcache']): Pick<InstanceConfig, 'lmcache'> {
  if (own === undefined) return {};
  const { receiver_host: receiverHost, init_ports: initPorts, alloc_ports: allocPorts } = own;
  const { query_ports: queryPorts, notices } = own;
  return {
    lmcache: {
      ...(receiverHost === undefined ? {} : { receiverHost }),
      ...(initPorts === undefined ? {} : { initPorts }),
      ...(allocPorts === undefined ? {} : { allocPorts }),
      ...(queryPorts === undefined ? {} : { queryPorts }),
      ...(notices === undefined ? {} : { notices }),
    },
  };
}
