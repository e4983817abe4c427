/** Named in the type declarations of @connectrpc/connect and absent from @types/node. */
type HeadersInit = ConstructorParameters<typeof Headers>[0];
