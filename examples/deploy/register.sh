# Tells the SuperLink of compose.yaml the public keys of its nodes; it runs in the SuperLink's container.
set -e
printf '[superlink.mine]\naddress = "127.0.0.1:8000"\nroot-certificates = "/certs/ca.crt"\n' \
    > "$HOME/.flwr/config.toml"
for key in /certs/node*.pub; do
    flwr supernode register "$key" mine
done
