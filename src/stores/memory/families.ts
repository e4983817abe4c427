import { joinUnambiguously } from '../entry.ts';
import type { NewEntry } from '../store.ts';

/** What many entries say alike. */
export interface Family {
  readonly tenant: string;
  readonly model: string;
  readonly adapter: string;
  readonly owner: NewEntry['owner'];
  readonly connector: string;
}

/** The same text for equal families alone. */
export function familyIdOf({ tenant, model, adapter, owner, connector }: Family): string {
  const { instanceId, engineId, compatGroup, life } = owner;
  const { processStartSeconds = '', generation } = life;
  const lifeText = `${generation} ${processStartSeconds}`;
  return joinUnambiguously([
    tenant,
    model,
    adapter,
    connector,
    instanceId,
    engineId,
    compatGroup,
    life.engineId,
    lifeText,
  ]);
}
