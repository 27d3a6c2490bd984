# Tells the SuperLink of compose.yaml the public keys of its nodes.
set -e
printf '[superlink.mine]\naddress = "superlink:8000"\nroot-certificates = "/certs/ca.crt"\n' > "$HOME/.flwr/config.toml"
for key in /certs/node*.pub; do
    flwr supernode register "$key" mine
done
