import type { LaunchInstance, LaunchSettings } from './topology.ts';

const GIB = 2 ** 30;

/**
 * The configuration of LMCache in one engine. The keys of the hand-over stand there twice, as `pd_*` and under the names
 * of older releases (`nixl_*`): a release reads those it knows and only warns of the others.
 */
export function lmcacheYaml(instance: LaunchInstance, settings: LaunchSettings, host: string): string {
  const prefill = instance.role === 'prefill';
  const role = prefill ? 'sender' : 'receiver';
  const bufferSize = prefill ? GIB : 2 * GIB;
  const ends: readonly (readonly [string, string | number])[] = prefill
    ? [
        ['proxy_host', host],
        ['proxy_port', settings.noticePort],
      ]
    : [
        ['peer_host', host],
        ['peer_init_port', ranks(instance.initPort, instance)],
        ['peer_alloc_port', ranks(instance.allocPort, instance)],
      ];
  const both: readonly (readonly [string, string | number])[] = [
    ['role', role],
    ...ends,
    ['buffer_size', bufferSize],
    ['buffer_device', settings.device],
  ];
  const lines: readonly (readonly [string, string | number])[] = [
    ['local_cpu', 'false'],
    ['max_local_cpu_size', 0],
    ...(prefill ? ([['max_local_disk_size', 0]] as const) : []),
    ['enable_pd', 'true'],
    ['transfer_channel', 'nixl'],
    ['nixl_backends', '[UCX]'],
    ['pd_backend_mode', 'async'],
    ['pd_max_prefill_len', 16_384],
    // Without it a full buffer would block for ever.
    ['pd_allocation_timeout_sec', 10],
    ...both.map(([key, value]) => [`pd_${key}`, value] as const),
    ['enable_nixl', 'true'],
    ['enable_xpyd', 'true'],
    ...both.map(([key, value]) => [`nixl_${key}`, value] as const),
  ];
  return lines.map(([key, value]) => `${key}: ${value}\n`).join('');
}

/** One port, or the list that is indexed by rank. */
function ranks(first: number, { tensorParallelSize }: LaunchInstance): string | number {
  if (tensorParallelSize === 1) return first;
  return `[${Array.from({ length: tensorParallelSize }, (_, rank) => first + rank).join(', ')}]`;
}
