import { type Instance, Role } from '../../gen/baton/v1/instance_pb.ts';
import type { InstanceConfig } from '../config/config.ts';
import { derive, type Settings } from '../config/settings.ts';
import { decideEngineAuth } from '../core/engine-auth.ts';
import type { EngineHeaders } from '../services/hand-over.ts';
import type { InstanceView } from '../services/instance-view.ts';

/** Credential of a leg to an instance. */
export type EngineHeadersOf = (instanceId: string, authorization: string | undefined) => EngineHeaders;

/** What legs to an instance carry of its own; undefined for one that is not known here. */
export type CredentialsOf = (instanceId: string) => Pick<InstanceConfig, 'headers' | 'apiKey'> | undefined;

/**
 * Credentials for instances of a registry elsewhere, which tells none: those that the settings of this process give to the
 * instance, else to its pool.
 */
export function credentialsElsewhere(settings: Settings, view: Pick<InstanceView, 'snapshot'>): CredentialsOf {
  const named = derive(
    settings,
    ({ instances }) => instances,
    (instances) => new Map(instances.map((instance) => [instance.id, instance])),
  );
  let seen: readonly Instance[] = [];
  let roles = new Map<string, Role>();
  return (instanceId) => {
    const snapshot = view.snapshot();
    if (snapshot !== seen) {
      seen = snapshot;
      roles = new Map(snapshot.map(({ id, role }) => [id, role]));
    }
    const pool = POOL_OF[roles.get(instanceId) ?? Role.UNSPECIFIED] ?? 'both';
    return named().get(instanceId) ?? settings.current.instanceDefaults[pool];
  };
}

/** The pool in the settings that an instance belongs to. */
export const POOL_OF: Readonly<Partial<Record<Role, InstanceConfig['role']>>> = {
  [Role.PREFILL]: 'prefill',
  [Role.DECODE]: 'decode',
};

/** Credentials of legs: the instance's own, else the process-wide key. */
export function engineHeadersOf(settings: Settings, credentialsOf: CredentialsOf): EngineHeadersOf {
  return (instanceId, clientAuthorization) => {
    const config = settings.current;
    const instance = credentialsOf(instanceId);
    const configured = Object.keys(instance?.headers ?? {}).some((name) => name.toLowerCase() === 'authorization');
    // A credential among the pool's headers is baton's own, as the pool's key is.
    if (configured) return { headers: { ...instance?.headers }, auth: 'own' };
    const { authorization, auth } = decideEngineAuth({
      mode: config.engineAuth,
      engineKey: instance?.apiKey ?? config.openaiApiKey,
      clientAuthorization,
      batonAuthenticates: config.auth.apiKeysFile !== undefined || config.auth.jwt !== undefined,
    });
    return { headers: { ...instance?.headers, ...(authorization === undefined ? {} : { authorization }) }, auth };
  };
}
