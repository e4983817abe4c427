import type { Instance } from '../../gen/baton/v1/instance_pb.ts';
import { InstanceState } from '../../gen/baton/v1/instance_pb.ts';
import { stateWord } from '../core/instance-words.ts';
import { isRoutable } from '../core/pools.ts';
import type { InstanceView } from '../services/instance-view.ts';
import type { TenantLimits } from '../services/tenant-limits.ts';
import type { Authenticate } from './authenticate.ts';
import type { FacadeService } from './facade.ts';
import { type GenerateDeps, serveGenerate } from './generate.ts';
import type { ProxyRules } from './tenant-header.ts';

/** What `/health` tells of the store. */
export interface StoreHealth {
  /** Live handles. */
  readonly conversations: number;
  /** Handles that expired since the last look. */
  readonly expired: number;
}

/** What the service is built from. */
export interface FacadeServiceDeps {
  /** What a request that begins now works with, to its end. */
  readonly generate: () => GenerateDeps;
  readonly authenticate: Authenticate;
  readonly proxies: () => ProxyRules;
  readonly tenantLimits: TenantLimits;
  readonly view: InstanceView;
  /** Connector of the instances that requests are routed to. */
  readonly connector: string;
  /** Undefined where the store runs elsewhere. */
  readonly storeHealth: (() => Promise<StoreHealth>) | undefined;
  /** No request can be planned: the router of another process is away. */
  readonly isRouterAway: () => boolean;
}

/** What the facade answers with once everything runs. */
export function buildFacadeService(deps: FacadeServiceDeps): FacadeService {
  const { generate, authenticate, proxies, tenantLimits, view, connector, storeHealth, isRouterAway } = deps;
  return {
    authenticate,
    proxies,
    tenantLimits,
    serve: (api, request, reply) => serveGenerate(generate(), api, request, reply),
    modelCards: () => modelCards(view.snapshot()),
    async health() {
      // The example proxy's two fields; a facade without the store beside it does not know them.
      const { conversations, expired } = (await storeHealth?.()) ?? { conversations: 0, expired: 0 };
      return { conversations, expired, instances: countStates(view.snapshot()) };
    },
    obstacle() {
      if (isRouterAway()) return 'the router is away';
      return isRoutable(view.snapshot(), connector) ? undefined : 'no routable engines';
    },
  };
}

/** The union of the pools' model cards as the engines wrote them, each id once. */
function modelCards(instances: readonly Instance[]): string[] {
  const byId = new Map<string, string>();
  for (const { models, state } of instances) {
    if (state === InstanceState.GONE) continue;
    for (const card of models) if (!byId.has(card.id)) byId.set(card.id, card.rawJson);
  }
  return [...byId.values()];
}

function countStates(instances: readonly Instance[]): Record<string, number> {
  const counts: Record<string, number> = {};
  for (const { state } of instances) {
    const name = stateWord(state);
    counts[name] = (counts[name] ?? 0) + 1;
  }
  return counts;
}
