import type { DescMethod } from '@bufbuild/protobuf';
import { createContextKey } from '@connectrpc/connect';
import { PoolRegistry } from '../../gen/baton/v1/pool_registry_pb.ts';
import { Router } from '../../gen/baton/v1/router_pb.ts';
import { Health } from '../../gen/grpc/health/v1/health_pb.ts';
import { BatonError } from '../core/errors.ts';
import { bearerKey, type RpcTokens } from '../core/tenant.ts';
import { hashCredential, operatorRequired, presentedTenant } from '../services/credential.ts';
import type { StoreCaller } from '../services/kv-store-arguments.ts';
import { connectErrorFromBaton } from './errors.ts';

/** Tells from an `Authorization` header who calls; a BatonError when the header is not enough. */
export type CallerOf = (authorization: string | undefined) => StoreCaller | BatonError;

const NOBODY: StoreCaller = { tenant: '', actsForAnyTenant: false, mayTakeUnverified: false, isOperator: false };

/** Who makes a call, in the context values of each call that came through the RPC port. */
export const CALLER = createContextKey<StoreCaller>(NOBODY);

/**
 * Makes the check of tokens; `tokens` is asked for every call. While it gives undefined whoever reaches the port acts
 * for any tenant and as operator, and may take without a proof if `unsafe`.
 */
export function createCallerOf(tokens: () => RpcTokens | undefined, unsafe: boolean): CallerOf {
  return (authorization) => {
    const known = tokens();
    if (known === undefined) {
      const tenant = presentedTenant(authorization);
      return { tenant, actsForAnyTenant: true, mayTakeUnverified: unsafe, isOperator: true };
    }
    const token = bearerKey(authorization);
    // Looked up by its hash: how long that takes tells nothing about the tokens.
    const rights = token === undefined ? undefined : known.get(hashCredential(token));
    if (rights === undefined) {
      const message =
        authorization === undefined
          ? 'a token is needed: send it as `Authorization: Bearer TOKEN`'
          : 'the token is not valid';
      return new BatonError({ reason: 'CREDENTIAL_REQUIRED', message });
    }
    const { tenant, anyTenant, operator, unverified } = rights;
    return { tenant, actsForAnyTenant: anyTenant, mayTakeUnverified: unverified, isOperator: operator };
  };
}

/** Finds out who calls before a request is read; undefined where nobody needs to know. A refusal is thrown as the error of the call. */
export function admitCaller(
  callerOf: CallerOf,
  method: DescMethod,
  authorization: string | undefined,
): StoreCaller | undefined {
  const needs = NEEDS.get(method) ?? 'token';
  if (needs === 'nothing') return undefined;
  const caller = callerOf(authorization);
  if (caller instanceof BatonError) throw connectErrorFromBaton(caller);
  const refusal = refusalOf(needs, caller, method);
  if (refusal !== undefined) throw connectErrorFromBaton(refusal);
  return caller;
}

type Need = 'nothing' | 'token' | 'any-tenant' | 'operator';

// All others need a token; the store looks at the tenants of its calls itself.
const NEEDS: ReadonlyMap<DescMethod, Need> = new Map<DescMethod, Need>([
  ...Health.methods.map((method) => [method, 'nothing'] as const),
  ...Router.methods.map((method) => [method, 'any-tenant'] as const),
  ...PoolRegistry.methods.map((method) => [method, 'operator'] as const),
  [PoolRegistry.method.getInstance, 'token'],
  [PoolRegistry.method.listInstances, 'token'],
  [PoolRegistry.method.watchInstances, 'token'],
]);

function refusalOf(need: Need, caller: StoreCaller, { parent, name }: DescMethod): BatonError | undefined {
  const method = `${parent.typeName}/${name}`;
  if (need === 'operator' && !caller.isOperator) return operatorRequired(method);
  if (need !== 'any-tenant' || caller.actsForAnyTenant) return undefined;
  const message = 'the method names tenants and needs a credential that acts for any tenant';
  return new BatonError({ reason: 'TENANT_FORBIDDEN', message, metadata: { method } });
}
